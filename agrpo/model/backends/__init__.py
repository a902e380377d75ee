"""Attention back ends for tree rows: objects behind one interface (`choice.Backend`), and the rule that chooses one."""
