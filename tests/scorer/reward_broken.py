raise RuntimeError("half a module")
