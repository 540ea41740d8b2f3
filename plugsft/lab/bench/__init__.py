"""`plugsft bench`: cost and gain of each plugin, measured."""
