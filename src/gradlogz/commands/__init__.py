"""The commands: parse the options, call a chapter, render through reporting, write.

A command is the module of its name: the signature of its function `command` declares the options, and the function
returns the exit status.

boundary        bad input becomes one line and exit status 2
outputs         pages, JSON and progress bars, the same for all commands

A module here is imported before torch: it imports chapters when its command runs.
"""
