"""Built-in world of verifiable instructions: write about a topic, and follow one to three instructions that a program
can check.

The idea is IFEval's (Zhou et al. 2023, arXiv 2311.07911); kinds, wording, topics and checks are our own.
"""
