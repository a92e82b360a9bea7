"""The measuring loop: runs an engine, records the phases of its steps, and watches over it."""
