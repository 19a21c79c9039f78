"""The engine that says what a script tells it to, which is what `sparring try` plays programs on too."""

from sparring.engine.scripted import Script as Script
from sparring.engine.scripted import ScriptedEngine as ScriptedEngine
from sparring.engine.scripted import replies as replies
