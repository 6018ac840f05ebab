"""Sessions over placements of a model's blocks, in virtual time."""
