"""The same method file on a real federation: a hub, nodes, and messages between them."""
