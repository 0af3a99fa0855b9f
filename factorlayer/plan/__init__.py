"""Which kernels run a chain or a stack: the planner, its plans, and other ways to run the same."""
