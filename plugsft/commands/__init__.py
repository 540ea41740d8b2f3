"""One thin module a verb: options and help. What runs is imported when the verb is called."""
