"""The live model inside an engine: copy plan, read-back proof, receipts. Knows torch and no engine."""
