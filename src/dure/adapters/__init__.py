"""Everything that touches the world: databases, machines, processes."""
