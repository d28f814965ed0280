"""How the model's own questions and documents begin, by language.

An instruct model that is given the chat template up to where a user speaks writes what a user would
ask. Half of the questions begin with one of these words, so that the text covers what users ask for
and not only what the model likes to ask. They are ours. Add none that begins as the questions of a
benchmark do that we measure with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from quickbeam.errors import InvalidInput

# Questions by language; "code" is about programs, in English.
QUESTIONS: Mapping[str, Sequence[str]] = {
    "en": (
        "Write a", "Write a short story about", "Write an email", "Write a Python function",
        "Write a program that", "Explain", "Explain how", "What is", "What are the", "How do I",
        "How can", "How many", "Why", "Who was", "When did", "Where is", "Which", "Can you",
        "Give me", "List", "Name three", "Describe", "Compare", "Translate to English:",
        "Translate the following sentence from Spanish to English:", "Translate to French:",
        "Summarize the following article:\n\n", "Sum up what follows.\n\n",
        "Give a summary of this text:\n\n", "Rewrite", "Correct the mistakes in this text:",
        "Continue this story:", "Answer the question using the text below.\n\n", "Passage:",
        "Document:", "Read the text and answer the question.\n\n", "Solve", "Calculate", "If a",
        "A train", "There are", "John has", "Maria buys", "A farmer", "A shop sells", "Find the",
        "Prove that", "Let x", "Classify", "Extract", "Imagine you are", "You are", "Pretend",
        "Act as", "Create a", "Design", "Plan", "Suggest", "Tell me about", "Tell me a", "Is it",
        "Should I", "I want to", "I have a", "Here is a", "Given the",
        "Complete this function:\n\ndef ", "def ", "What does this code do?\n\n",
        "Fix this code:\n\n", "In the", "Translate into English: Die",
        "Translate this to English: Er", "What does this mean in English: Ich",
        "Translate into English: Il", "Translate this to English: El",
        "Translate English to German:", "How would you say in French:",
    ),
    "code": (
        "Write a Python function", "Write a Python class", "Write a JavaScript function",
        "Write a TypeScript", "Write a C++ program", "Write a C function", "Write a Rust function",
        "Write a Go program", "Write a Java class", "Write a Kotlin", "Write a Ruby script",
        "Write a PHP", "Write a bash script", "Write an SQL query", "Write a regular expression",
        "Write a Dockerfile", "Write an HTML page", "Write CSS", "Write unit tests for",
        "Implement", "How do I", "Refactor this code:\n\n", "What is wrong with this code?\n\n",
        "Explain this code:\n\n", "Translate this Python code to JavaScript:\n\n",
        "Add comments to this code:\n\n", "I get this error:\n\n", "What does this query do?\n\n",
    ),
    "zh": (
        "写一篇", "写一个", "请解释", "什么是", "如何", "为什么", "请介绍",
        "请把下面的句子翻译成英文：", "用Python写", "列出", "总结下面的文章：\n\n", "比较", "我想",
    ),
    "es": (
        "Escribe un", "Escribe una", "Explica", "¿Qué es", "¿Cómo", "¿Por qué", "¿Cuál es",
        "Haz una lista", "Traduce al inglés:", "Resume el siguiente texto:\n\n", "Quiero",
        "¿Quién",
    ),
    "fr": (
        "Écris un", "Écris une", "Explique", "Qu'est-ce que", "Comment", "Pourquoi", "Quelle est",
        "Donne-moi", "Traduis en anglais :", "Résume le texte suivant :\n\n", "Je voudrais", "Qui",
    ),
    "de": (
        "Schreibe ein", "Schreibe eine", "Erkläre", "Was ist", "Wie", "Warum", "Welche", "Nenne",
        "Übersetze ins Englische:", "Fasse den folgenden Text zusammen:\n\n", "Ich möchte", "Wer",
    ),
    "pt": (
        "Escreva um", "Escreva uma", "Explique", "O que é", "Como", "Por que", "Qual é", "Liste",
        "Traduza para o inglês:", "Resuma o texto a seguir:\n\n", "Eu quero", "Quem",
    ),
    "it": (
        "Scrivi un", "Scrivi una", "Spiega", "Che cos'è", "Come", "Perché", "Qual è", "Elenca",
        "Traduci in inglese:", "Riassumi il testo seguente:\n\n", "Vorrei", "Chi",
    ),
    "ru": (
        "Напиши", "Объясни", "Что такое", "Как", "Почему", "Какие", "Перечисли", "Расскажи о",
        "Переведи на английский:", "Кратко перескажи текст:\n\n", "Я хочу", "Кто",
    ),
    "ja": (
        "書いてください。", "説明してください：", "とは何ですか", "どのように", "なぜ",
        "次の文を英語に訳してください：", "Pythonで", "例を三つ挙げて",
        "次の文章を要約してください：\n\n", "日本の", "私は",
    ),
    "ko": (
        "다음을 설명해", "무엇인가요", "어떻게", "왜", "다음 문장을 영어로 번역해 줘:",
        "파이썬으로", "목록을", "다음 글을 요약해 줘:\n\n", "한국의", "나는",
    ),
    "ar": (
        "اكتب", "اشرح", "ما هو", "ما هي", "كيف", "لماذا", "من هو", "ترجم إلى الإنجليزية:",
        "لخص النص التالي:\n\n", "أريد",
    ),
}  # fmt: skip

# Documents by language.
DOCUMENTS: Mapping[str, Sequence[str]] = {
    "en": (
        "LONDON --", "NEW YORK --", "By Sarah", "By James", "The mayor of", "Police said",
        "A man was", "A woman from", "Scientists at", "In 19", "On Monday,", "According to",
        "The company", "The president", "Once upon a time", "Chapter 1\n\n", "Dear", "Abstract:",
        "The history of", "He was born in", "She is a", "Located in", "The film", "The team",
        "Researchers", "How to", "The average", "There are several", "When I", "For many years",
        "Officials in", "The river", "The band", "Doctors", "The court", "Parents of", "The novel",
        "During the war", "Der", "Die",
    ),
    "code": (
        "#!/usr/bin/env python\n", "import os\nimport sys\n", "#include <iostream>\n",
        "package main\n", "use std::", "public class", "const express =", "SELECT",
        "<!DOCTYPE html>\n", "# README\n\n", "class", "/**\n *",
    ),
    "zh": ("据报道，", "从前，", "本文", "第一章\n\n", "中国"),
    "es": ("Según", "Había una vez", "La historia de", "El presidente", "En el año"),
    "fr": ("Selon", "Il était une fois", "L'histoire de", "Le président", "En 19"),
    "de": ("Der", "Die", "Es war einmal", "Nach Angaben", "Im Jahr"),
    "pt": ("Segundo", "Era uma vez", "A história de", "O presidente", "No ano"),
    "it": ("Secondo", "C'era una volta", "La storia di", "Il presidente", "Nel"),
    "ru": ("По данным", "Жил-был", "История", "Президент", "В 19"),
    "ja": ("昔々、", "日本の", "第一章\n\n", "研究者"),
    "ko": ("옛날 옛적에", "한국의", "연구에 따르면"),
    "ar": ("وفقا", "كان يا ما كان", "تاريخ"),
}  # fmt: skip

LANGUAGES = tuple(QUESTIONS)


def questions(languages: Sequence[str]) -> list[str]:
    """Return how questions in these `languages` begin, as many of each.

    Raises `InvalidInput` for a language without any.
    """
    return _evenly(QUESTIONS, languages)


def documents(languages: Sequence[str]) -> list[str]:
    """Return how documents in these `languages` begin, as many of each.

    Raises `InvalidInput` for a language without any.
    """
    return _evenly(DOCUMENTS, languages)


def _evenly(words: Mapping[str, Sequence[str]], languages: Sequence[str]) -> list[str]:
    if unknown := [language for language in languages if language not in words]:
        raise InvalidInput(
            f"no language {unknown[0]!r} to write text in: choose among {', '.join(LANGUAGES)}"
        )
    if not languages:
        raise InvalidInput(f"no language to write text in: choose among {', '.join(LANGUAGES)}")
    longest = max(len(words[language]) for language in languages)
    return [opener for language in languages for opener in islice(cycle(words[language]), longest)]
