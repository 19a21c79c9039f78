"""Images of boxes: archives in the formats of the Open Container Initiative and of Docker, unpacked into layers."""
