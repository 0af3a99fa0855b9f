"""Any function of single elements, its derivative, and how it is written in C++."""
