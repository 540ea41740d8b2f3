"""The ground floor: errors, console, files and processes."""
