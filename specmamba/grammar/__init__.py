"""Structured output: compiled grammars, and masks of the tokens that a grammar allows after each draft node."""

from specmamba.grammar.compilations import CompiledGrammar
from specmamba.grammar.compiler import GrammarCompiler
from specmamba.grammar.matcher import GrammarMatcher, TreeMask

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarMatcher", "TreeMask"]
