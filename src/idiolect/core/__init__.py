"""What everything stands on: trees, optimisers, losses, networks, one client, the contract."""
