"""Connects the plugin to Megatron-LM.

Only this folder and `harness` import megatron.

Nothing here is imported by `import megatron_cp_plugin`.
"""
