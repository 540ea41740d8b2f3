"""What the command line does; cli.py loads one of these when its command is called."""
