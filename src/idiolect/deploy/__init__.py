"""The same method file on a real federation: a server, nodes, and messages between them."""
