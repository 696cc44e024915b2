"""Environment variables by which the plugin in vLLM's processes is told what to do."""

SHIM = "HEADSTART_SHIM"  # architectures that get the interface: "Gemma2ForCausalLM,StableLmForCausalLM", or "all"
LAYERS_PATH = "HEADSTART_LAYERS_PATH"  # target.layers_path, where the user has set it
