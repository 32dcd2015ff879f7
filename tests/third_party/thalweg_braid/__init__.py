"""What another distribution looks like: a connection of four streams, found through its entry point."""
