"""The recipe: typed tables, and the parser that explains mistakes."""
