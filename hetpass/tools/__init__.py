"""The command line: `hetpass COMMAND`. The only room that prints."""
