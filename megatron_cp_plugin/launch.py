"""`torchrun -m megatron_cp_plugin.launch SCRIPT [flags]`: see integration/launch.py."""

from megatron_cp_plugin.integration.launch import main

if __name__ == "__main__":
    main()
