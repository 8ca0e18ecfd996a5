"""Conversations: rows of messages through a chat template, learned where the assistant speaks."""
