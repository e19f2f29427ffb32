"""Programs around training: a GPT pretraining program, and how runs are started and compared.

It imports megatron, as `integration` does, and `integration`; what trains needs it for recordings
alone. Nothing here is imported by `import megatron_cp_plugin`.
"""
