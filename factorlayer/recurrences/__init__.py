"""What FactorGRU and FactorGRUCell are made of: cells, layouts of their inputs, and how they run."""
