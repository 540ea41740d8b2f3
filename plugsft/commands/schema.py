"""`plugsft schema`: the JSON schema of recipes, for editors."""


def schema() -> None:
    """Print the JSON schema of recipes, plugins included, for editors."""
    from .json_schema import schema_text

    print(schema_text())
