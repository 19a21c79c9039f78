"""Engine whose replies a script decides; `sparring try` plays programs on it too."""

from sparring.engine.scripted import Script as Script
from sparring.engine.scripted import ScriptedEngine as ScriptedEngine
from sparring.engine.scripted import replies as replies
