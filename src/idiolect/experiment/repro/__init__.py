"""The reproduction index: every table and figure of the papers, its status, and how to run it."""
