"""The `@resilient` loop: join, restore, train; on a fault leave, agree, and go on. One file a part."""
