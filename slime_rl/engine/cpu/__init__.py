"""What SGLang needs on a machine without CUDA. Entered through `slime_rl.engine.launch_engine` alone."""
