"""Studies of language models that people use: what attacks and defenses do to a real chat model."""
