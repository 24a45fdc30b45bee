"""Commands of the command line: parse options, compute, format through reporting, write files.

Each command is the module of the same name. The signature of its function `command` declares the options; the return
value is the exit status.

boundary        bad input is reported in one line, with exit status 2
outputs         pages, JSON and progress bars, shared by all commands

Modules in this folder are imported before torch, so they import the rest of the package inside `command`.
"""
