"""One step of a decoder: embedding, recurrent unit, head and choice."""
