from tests.servers.counting import shelf as shelf
