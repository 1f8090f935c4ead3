"""Models by name, as train steps on shapes: `hetpass plan gpt-2.6B --cluster FILE`."""
