"""Measures: images, copies, perplexity, survival times, intervals, memory, timing. Heavy packages load on use."""
