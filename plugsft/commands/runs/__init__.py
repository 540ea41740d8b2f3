"""`plugsft diff`, `show`, `export` and `chat`: finished runs."""
