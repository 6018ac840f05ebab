"""Where the blocks of a model go, and which chain of servers a request takes."""
