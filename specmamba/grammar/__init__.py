"""Structured output: compiled grammars, and masks of the tokens that a grammar allows after each draft node."""

from specmamba.grammar.compilations import CompiledGrammar
from specmamba.grammar.compiler import GrammarCompiler
from specmamba.grammar.follower import GrammarFollower
from specmamba.grammar.mask_maker import MaskMaker
from specmamba.grammar.matcher import GrammarMatcher, TreeMask

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarFollower", "GrammarMatcher", "MaskMaker", "TreeMask"]
