"""The catalog: the only SQL of the engine, and the only room that knows SQLite."""
