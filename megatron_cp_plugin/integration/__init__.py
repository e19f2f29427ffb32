"""The Megatron-LM side of the plugin: the only folder that imports megatron.

Nothing here is imported by `import megatron_cp_plugin`.
"""
