"""Path of torch's meta device: shapes without values, to count memory."""
