"""The kernel families, in rooms by what they multiply, and here what several of them share."""
