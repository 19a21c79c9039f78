"""Rules of single papers, which few recipes pick. Others are in `algo/credit`, `algo/gate`, `algo/shaping` and
`algo/loss/preference`."""
