"""Tables of the papers that flexengine descends from, made anew and printed beside the published figures."""
