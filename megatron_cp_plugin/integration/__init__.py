"""The Megatron-LM side of the plugin: what puts an algorithm in force there.

Only this folder and `harness` import megatron.

Nothing here is imported by `import megatron_cp_plugin`.
"""
