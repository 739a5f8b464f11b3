"""ckptsync inside SGLang (>= 0.5.22): `register` in every process, `loader` in workers, `announcement` for both."""
