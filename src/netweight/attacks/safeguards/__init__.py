"""All attacks on a model's safeguards in one report: fine-tuning that is searched for, and edits without training."""
