"""Labelled images, text and prompts as data: users' files and public data sets. Nothing here knows a method."""
