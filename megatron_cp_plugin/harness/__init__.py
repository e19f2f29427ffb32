"""A GPT pretraining program, and tools that start and compare runs.

It imports megatron, as `integration` does, and `integration`; what trains needs it for recordings
alone. Nothing here is imported by `import megatron_cp_plugin`.
"""
