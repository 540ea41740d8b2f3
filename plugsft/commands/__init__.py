"""A file for a few commands each: options and help, then one call.

The work is in rooms that Python code calls too. It is imported when a command is called, so that
`plugsft --help` takes no second.
"""
