"""Which layout, how often to checkpoint: closed-form models, without torch and without I/O."""
